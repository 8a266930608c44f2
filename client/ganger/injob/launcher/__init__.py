"""The launcher: parent of a user's ranks, pre-imported so that a rank starts in milliseconds; it outlives the daemon.
`client` is for daemons; the rest runs in the process started by ``python -m ganger.injob.launcher``."""
