"""Tasks: a model and its data, for a section `task` of the configuration. One file each.

A model is a `Row` of modules. Its expensive, repeated part is its `blocks`: what is computed again in backward and what is split
over processes (`regroup.train.build`), are these. They are compiled, and so is, without a mesh, the output layer with the loss.
A model returns scores [..., classes] for integer targets [...], or their loss.
"""

from regroup.train import sections

from .task import Task


def build(settings: sections.Digits | sections.Cnn | sections.LanguageModel) -> Task:
    """Return the task of a configuration, in host memory, with parameters drawn from torch's generator. Raises DataError."""
    if isinstance(settings, sections.LanguageModel):
        from .language_model import language_model

        return language_model(settings)
    from .digits import cnn, digits

    return digits(settings) if isinstance(settings, sections.Digits) else cnn(settings)
