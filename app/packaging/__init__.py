"""The app as one folder that needs no Python: what PyInstaller is told, and the icon."""
