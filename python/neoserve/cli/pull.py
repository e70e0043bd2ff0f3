"""x"""


def pull() -> None:
    """x"""
