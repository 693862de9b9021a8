"""Finds and ends sandboxes that belong to this server's trials directory and to no running trial.

`owner` says whose a sandbox is, one module for each kind lists and ends them (`engines`, `kernel`,
`daytona`), `reaper` does so at start, all the time and at the end, and `command` shows it.
"""
