"""The papers' claims run again: one file per experiment, thresholds in thresholds.toml."""
