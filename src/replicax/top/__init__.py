"""`replicax top`: a view of a running job, on a terminal, as a table, or as a page.

view        what is shown: rows made of the answers of all tasks, with rates
table       the view as a table of rich
terminal    the live view, and its keys
web         the same view as a page on the loopback interface
"""
