"""The protocol and the data path of Slackwater; it knows no vendor and does no I/O at import."""
