def my_policy(request):
    """Let classes of lengths wait for later arrivals."""
    place = request.arrival + 6 * request.num_earlier
    for limit, delay in ((30, 3), (80, 5), (200, 25)):
        if request.num_prompt_tokens > limit:
            place += delay
    return place
