"""Tasks: a model and its data for each section `task` of the configuration.

A model is a `Chain` of modules. Its `blocks` are the expensive, repeated part. `regroup.train.build` recomputes them in backward,
splits them over processes and compiles them, and compiles the output layer with the loss if there is no mesh.
A model returns scores [..., classes] for integer targets [...], or their loss.
"""

from regroup.train import sections

from .task import Task


def build(settings: sections.Digits | sections.Cnn | sections.LanguageModel) -> Task:
    """Return the task of a configuration in host memory. torch's generator draws its parameters. Raises DataError."""
    if isinstance(settings, sections.LanguageModel):
        from .language_model import language_model

        return language_model(settings)
    from .digits import cnn, digits

    return digits(settings) if isinstance(settings, sections.Digits) else cnn(settings)
