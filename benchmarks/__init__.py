"""One module per question; each prints one JSON document as its last line."""
