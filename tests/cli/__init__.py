"""The `kvgraft` command as a user runs it: another process, real files, exit statuses."""
