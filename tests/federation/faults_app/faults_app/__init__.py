"""An experiment of comfetch whose clients can be held in mid-round, for tests of what goes wrong then."""
