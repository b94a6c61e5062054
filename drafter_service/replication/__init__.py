"""The log of finished requests that replicas share: its events, its format, and both of its ends."""
