"""Reports on what drafting saves: JSON, terminal and HTML."""
