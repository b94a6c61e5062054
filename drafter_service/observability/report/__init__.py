"""What drafting was worth: reports as JSON, in the terminal and as a page."""
