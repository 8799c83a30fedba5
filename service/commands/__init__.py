"""One file per command. With ``cli.py`` the composition root: only here may the service import the client, lazily."""
