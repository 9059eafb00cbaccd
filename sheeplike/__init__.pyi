from sheeplike.inspection.model import load as load
from sheeplike.run.experiment import init as init

__all__ = ["__version__", "init", "load"]

__version__: str
xla_started_before_import: bool
