"""What an architecture requires of a config: a property that its file does not handle is refused, never ignored."""

from __future__ import annotations

from neoserve.types.errors import UnsupportedModelError
from neoserve.types.model import ModelConfig


def require(config: ModelConfig, *, windows: bool | None = None, **expected: object) -> None:
    """Raises UnsupportedModelError unless each named field of ``config`` equals its expected value.

    ``windows=False`` refuses sliding-window layers.
    """
    for field, value in expected.items():
        found = getattr(config, field)
        if found != value:
            raise UnsupportedModelError(
                f"architecture {config.architecture}: {field} is {found!r}; this build supports only {value!r}"
            )
    windowed = [layer for layer, window in enumerate(config.layer_windows) if window is not None]
    if windows is False and windowed:
        raise UnsupportedModelError(
            f"architecture {config.architecture}: layer {windowed[0]} has a sliding window of "
            f"{config.layer_windows[windowed[0]]}; this architecture has none (mistral has)"
        )
