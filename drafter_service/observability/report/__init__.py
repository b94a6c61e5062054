"""Reports on the savings from drafting: JSON, terminal and HTML."""
