"""Tasks: a model and its data, for a section `task` of the configuration. One file each.

A model's expensive, repeated part is its `blocks`, a ModuleList or Sequential: what is compiled and what is computed again in
backward, and what is split over processes
(`regroup.train.build`), are these. It returns scores [..., classes] for integer targets [...].
"""

from regroup.train import config

from .task import Task


def build(settings: config.Digits | config.Cnn | config.LanguageModel) -> Task:
    """Return the task of a configuration, in host memory, with parameters drawn from torch's generator. Raises DataError."""
    if isinstance(settings, config.LanguageModel):
        from .language_model import language_model

        return language_model(settings)
    from .digits import cnn, digits

    return digits(settings) if isinstance(settings, config.Digits) else cnn(settings)
