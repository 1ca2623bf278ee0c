"""What a person and a service see of training: the command, job folders, the HTTP service, publishing."""
