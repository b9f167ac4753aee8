"""The truth about flags, metrics, variables, log lines and claims in a pasted guide or command line."""
