"""Every kind of drafter behind one flag. They share the face that `ssd.types.Drafter` describes."""
