"""Traces through the production core: submissions in, modelled nodes beside it, what became of every job out."""
