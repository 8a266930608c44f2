"""The zero-line form."""


def install() -> None:
    pass


def stand_down() -> None:
    pass
