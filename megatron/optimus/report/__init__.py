"""Shows runs by the files in their folders: one page for a browser, and a live view for the terminal.

read.py     what a run's folder holds, however unfinished or damaged
curves.py   curves small enough for a page, and where the time went
page.py     the page of ``optimus report``: page.html, page.css and page.js with the runs' data
watch.py    the view of ``optimus watch``; plot.py: curves as text

Nothing here needs torch, so both commands start at once.
"""
