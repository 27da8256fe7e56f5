"""Shows runs from the files in their folders: one page for a browser, a live view for the terminal, a sweep's table.

read.py     what a run's folder holds, however unfinished or damaged
curves.py   curves small enough for a page, and where the time went
page.py     the page of ``optimus report``: page.html, page.css and page.js with the runs' data
watch.py    the view of ``optimus watch``; plot.py: curves as text
sweep.py    the table and picture of ``optimus sweep``; figure.py: curves as a picture file

Nothing here may import torch, so that the commands start at once; files of runs are untrusted input.
"""
