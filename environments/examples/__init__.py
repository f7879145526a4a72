"""Three short environments to read, copy and change: `sql.py`, `web_form.py`, `shell.py`. Each has its own solver."""
