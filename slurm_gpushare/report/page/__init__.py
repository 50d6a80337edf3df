"""The report as one self-contained HTML page: no script, no network, readable on a phone, in the dark, on paper and by
a screen reader."""
