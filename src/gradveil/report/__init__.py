"""What an audit ends with: the page, the table in the terminal, and the object in a notebook."""

from gradveil.report.audit_report import Report
from gradveil.report.html import write_report
from gradveil.report.terminal import print_summary, table

__all__ = ["Report", "print_summary", "table", "write_report"]
