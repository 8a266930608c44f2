"""Installation and removal on machines of their own: `make install-check`."""
