"""SVG charts: functions from numbers to markup."""
