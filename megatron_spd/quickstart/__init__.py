"""The newcomer's command: a corpus, the steps of a job, a report and its pictures."""
