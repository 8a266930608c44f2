"""Classes of models, by the field that they come from: published profiles of one class look alike."""

from __future__ import annotations

from enum import Enum


class ModelClass(Enum):
    """The class of a model."""

    IMAGE = "image"
    LANGUAGE = "language"
    SPEECH = "speech"
    RECOMMENDATION = "recommendation"
