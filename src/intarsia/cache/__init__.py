"""What this machine has measured and built, kept on disk."""
