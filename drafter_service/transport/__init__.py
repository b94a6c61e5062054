"""What client and server share: the wire format, frames, addresses; and the server's step socket."""
