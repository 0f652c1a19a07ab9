"""Supported checkpoint formats; `detect` returns the format of a path."""

from __future__ import annotations

from flaxckpt._formats import DetectedFormat as Detected
from flaxckpt._formats import detect, recognises

__all__ = ["Detected", "detect", "recognises"]
