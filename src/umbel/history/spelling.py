"""Spelling: values and names as SQL writes them, where a parameter cannot stand."""


def text_literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def quoted_name(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'
