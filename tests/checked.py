"""How annotations are checked in tests: array shapes and types, and int where float is said."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
