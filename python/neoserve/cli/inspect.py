"""x"""


def inspect() -> None:
    """x"""
