"""Settings of the service, and the files, variables and flags that they are read from."""
