"""Files of users in: traces, prices, plans, jobs, profiles. Out: markets, machines and rates for backtests."""
