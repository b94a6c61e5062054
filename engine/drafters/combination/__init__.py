"""Several drafters combined into one."""
