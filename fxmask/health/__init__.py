"""Whether dynamic masks are alive: `fxmask.HealthLog`, its csv and its pictures."""

from .health_log import HealthLog as HealthLog
