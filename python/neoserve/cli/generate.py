"""x"""


def generate() -> None:
    """x"""
