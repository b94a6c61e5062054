"""Parts shared by client and server: the wire format, frames and addresses."""
