"""Tool calls in chats: the formats in which models write them, and how outputs are parsed and constrained."""
