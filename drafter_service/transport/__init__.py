"""What client and server share: the wire format, frames and addresses."""
