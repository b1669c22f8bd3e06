"""Texts of bounded length, for people."""


def shorten(text: str, length: int) -> str:
    """Return a text of at most `length` characters. A longer one ends at a word, with an ellipsis, so that its end does not look
    like the author's. A word that would take more than half of the room is cut."""
    if len(text) <= length:
        return text
    room = length - len("...")
    space = max(text.rfind(white, 0, room + 1) for white in (" ", "\n", "\t"))
    return text[: space if space >= room // 2 else room].rstrip(" \n\t.,;:(") + "..."
