"""The wire format, and the sockets it travels over."""
