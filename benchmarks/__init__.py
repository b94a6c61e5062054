"""One module or folder per question; each prints one JSON document as its last line."""
