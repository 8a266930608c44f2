"""Installation, removal and upgrade on machines of their own: `make install-check`."""
