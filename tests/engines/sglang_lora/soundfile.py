"""SGLang's server imports it, and nothing here makes a sound."""


def available_formats():
    return {}


class SoundFile:
    pass


class LibsndfileError(Exception):
    pass
