"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """`"1 clip"`, `"2 clips"`: a number with its noun, which is plural but for one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
