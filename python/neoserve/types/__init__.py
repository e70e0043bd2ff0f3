"""Messages and value types shared by every package. Imports nothing of ours outside this folder."""
