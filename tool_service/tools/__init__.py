"""The tools that come with the service. They are found in this directory as anybody's are in theirs."""
